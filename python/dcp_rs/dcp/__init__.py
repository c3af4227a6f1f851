"""torch's checkpoint protocol: reader, writer, planners, and what they tell each other."""

"""The commands, one module each. A module of two commands has what they share."""

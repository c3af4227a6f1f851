"""dcp-rs in the frameworks that people already have."""

"""What the command line takes. A command's function only hands its options on to who does the work."""

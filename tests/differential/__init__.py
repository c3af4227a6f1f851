"""Stock DCP as the judge: whatever hypothesis can think of is saved and loaded by both, and has to come out the same."""

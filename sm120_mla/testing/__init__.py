"""What the suite is made of: strategies, invariants, guards, faults. Sees kernels through a target only."""

"""The paper's figures, simulated and set beside what was published."""

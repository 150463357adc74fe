"""Which algorithm runs: costs, what ranks have agreed on, and the choice."""

"""What runs on one rank: its engine, its contexts, its messages, and who is still there."""

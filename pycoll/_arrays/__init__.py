"""Values: whatever a user passes becomes memory here, and comes back; operators on it."""

"""What a session is told of its slice, and later: what holds it to that."""

"""The pages for all users, and their texts."""

"""The pages that everybody may open, and what they show in words."""

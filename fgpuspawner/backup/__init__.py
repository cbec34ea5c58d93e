"""Backs up a running installation into one file, and restores it here or on another machine."""

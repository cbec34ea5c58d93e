"""An installation in one file, made while it runs, and put back on this machine or another."""

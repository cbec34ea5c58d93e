"""What sessions are started from: the catalogue, private images, and getting both to the engines."""

"""The REST API v1 (docs/rest-api.md): handlers, and their JSON objects."""

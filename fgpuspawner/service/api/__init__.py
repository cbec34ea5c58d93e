"""The REST API v1, as docs/rest-api.md says: handlers, and the JSON objects that they answer with."""

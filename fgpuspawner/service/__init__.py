"""The managed Hub service ``fgpu``: REST, event stream, first page, and the resume of waiting requests.

It reads the scheduler's database and never writes to it: sessions are ended through the Hub's own API,
with the caller's own rights.
"""

"""The administrators' pages, and the API below ``admin/``: all of it needs the scope of administrators."""

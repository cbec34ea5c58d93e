"""The administrators' pages, and the API below ``admin/``, for administrators of everything or of a resource group."""

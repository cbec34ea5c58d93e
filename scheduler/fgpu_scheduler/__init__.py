"""A scheduler for fractions of GPUs: a pure core, a store, and the loop that joins them.

``__init__.pyi`` lists the public names; everything else may change. Each is loaded on first use, so that a command
that needs an amount or an error does not import SQLAlchemy.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Other libraries' ways in; each module imports its library when its function is called, not before."""

__all__ = ["transformers"]

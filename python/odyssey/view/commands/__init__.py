"""Commands of this folder."""

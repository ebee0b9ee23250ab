"""Typed builders that tests of several files share. Run alone, they test nothing."""

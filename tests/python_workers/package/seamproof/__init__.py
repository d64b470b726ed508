"""A stand-in for the package, for tests of the program alone: its worker serves the mock."""

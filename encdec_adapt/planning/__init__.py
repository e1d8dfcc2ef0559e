"""Memory and time of programs on hardware that is not here."""

"""What a program will cost on hardware that is not here."""

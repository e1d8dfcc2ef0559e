"""Gemma 3 270M on one card without a network; see launch/real_model.sh."""

"""What is kept for a parameter, and how it is saved and loaded."""

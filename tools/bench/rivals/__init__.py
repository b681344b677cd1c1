"""What a user would pick instead, each driven as its users drive it. Nothing here is imported by the package."""

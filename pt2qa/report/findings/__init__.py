"""What a structure check found."""

"""What both front ends, Mojo and Python, share."""

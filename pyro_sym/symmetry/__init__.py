"""Groups that act on the values of sites."""

"""What makes other libraries use onepass. Importing this imports none of them."""

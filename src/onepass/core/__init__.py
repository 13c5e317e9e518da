"""What all other packages share: options, argument checks, and operations registered with torch."""

"""What every other folder shares: options, argument checks, operations registered with torch."""

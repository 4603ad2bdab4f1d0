"""Learn where embedding tables go, and run them there."""

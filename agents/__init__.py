"""PPO policies over tables and ranks: networks, training, export."""

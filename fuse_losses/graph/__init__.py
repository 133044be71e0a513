"""Reading the captured FX graph: V-wide products, the retraced tail behind them, the vocabulary region."""

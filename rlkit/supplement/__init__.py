"""SFT and DPO, the supplement of the assignment."""

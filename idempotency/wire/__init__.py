"""What travels and what is compared: keys, messages, results. No input or output."""

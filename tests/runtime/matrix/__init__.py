"""What a block does with the rest of torch, cell by cell: the table behind docs/torch.md and its tests."""

"""`FLASH_ATTN`: the class is in ``backend``, and nothing is imported before it is wanted."""

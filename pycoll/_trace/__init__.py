"""What ranks have done: records that outlive a rank, and the file that is made of them."""

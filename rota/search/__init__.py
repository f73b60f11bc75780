"""The search behind `strategy="auto"`: which of all strategies takes the shortest step in the memory that there is."""

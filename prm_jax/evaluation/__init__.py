"""What the numbers say: reranking of scored samples, and the report page."""

"""What a head says: the algebra, and the lift from ATen into it."""

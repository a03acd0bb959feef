"""What proves the lab right: claims, known bugs, broken twins, command lines, peers."""

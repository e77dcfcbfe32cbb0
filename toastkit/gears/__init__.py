"""Policy 3: in which precision modules are, and what asks for it."""

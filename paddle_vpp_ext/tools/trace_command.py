def add_command(commands): pass

def run_demo(options):
    return 0

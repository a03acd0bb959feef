"""Control behind a learned policy: MPC and QP atoms, whole-body limits, and the action contract u = C(s, a).

    riccati.py    the discrete Riccati recursion and its gain
    qp.py         two small QP solvers, the KKT residual, three standard problems
    mpc.py        condensing, planning, the receding horizon
    arm.py        a planar arm: kinematics and torques
    wbc.py        tasks by weight and by order, velocity and acceleration steps under limits, what a motion demands
    reference.py  references with time and validity
    stack.py      planner, MPC, manager, WBC, integrator: C(s, a), and what it does when something fails
    contract.py   the four contracts, exactly
    training.py   PPO through the stack
    nolimit.py    no objective adds a constraint
    solvers.py    packaged solvers as cross-checks
    worked.py, figure.py, command.py    what the command prints and draws

NumPy only up to `stack`; torch where a policy learns. To add a safe behaviour, add an entry to stack.SAFE; a solver, to solvers.
"""

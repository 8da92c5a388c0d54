"""The name under which Ray Serve is told of the router.

Serve pickles the router's class by value if the module that it was named by defines it, with copies of what the class
uses: metrics and decisions would then be others than this process's. A class that is only named here goes by reference.
"""

from pbkv_ray.routing.router import PbkvRouter

__all__ = ["PbkvRouter"]

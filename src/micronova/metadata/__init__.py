"""What a guest may know about itself: documents of OpenStack's and EC2's form, the same on a config drive and by HTTP.

Pure, apart from `vendordata`, which asks the operator's services.
"""

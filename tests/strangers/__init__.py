"""Every quantizer that a pip user can import on small nets: where plain torchao works, pt2qa must."""

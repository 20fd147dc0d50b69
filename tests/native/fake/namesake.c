int cuMemAlloc_v2(void);

int cuMemAlloc_v2(void)
{
    return 999;
}
